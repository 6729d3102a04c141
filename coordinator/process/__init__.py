"""What touches the world: the daemon, the database, HTTP, files."""
