"""`barnraise demo`: a whole run on this machine, with real processes, real sockets and real kills."""
