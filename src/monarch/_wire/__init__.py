"""What travels between processes, as values and bytes: pure, no I/O."""
