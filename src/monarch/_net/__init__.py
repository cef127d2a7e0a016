"""Links between processes: sockets, shared memory, routes."""
