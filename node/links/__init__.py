"""Links: whom a node wants to reach, by which ways it gets there, and which it keeps."""
