"""Whether devices and machines have the memory that a configuration needs: plain Python, before a model is loaded."""
