"""Runs whose folder is a URL (``run.dir: s3://bucket/run``): they work in a folder here, which is kept up there."""
