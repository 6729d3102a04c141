"""Drivers that both daemons share: key files, TCP links, the pump of a machine, process plumbing, metrics.

The only files of `protocol` that touch a clock, a socket, a thread, a disk or the system's randomness, but for three
that read a file which a person names (`protocol/README.md`).
"""
