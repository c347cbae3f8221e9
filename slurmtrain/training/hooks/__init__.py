"""What hangs on the training loop: one module for each concern."""
