"""Links through NATs: ICE in a helper process, and the daemon's end of it."""
