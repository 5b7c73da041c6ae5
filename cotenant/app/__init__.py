"""From settings to a running server, for the command line and for programs of others alike."""
