"""Other servers beside ours."""
