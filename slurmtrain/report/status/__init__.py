"""What each run does now and will do next, from its own files and one look at the queue."""
