"""What is not as it should be on ranks and nodes: a module for each subject, and `majority`, by which they judge."""
