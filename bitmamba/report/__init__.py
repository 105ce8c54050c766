"""What people look at: the memory plan, screens, progress and pictures."""
