"""Records in memory, on several devices and on disk."""
