"""What a run leaves to look at: the log, trackers, the console, and the HTML report."""
