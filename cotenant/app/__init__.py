"""Turn settings into a running server, for the command line and for Python programs."""
