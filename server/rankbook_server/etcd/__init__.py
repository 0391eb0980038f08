"""A small asyncio client of etcd, of its own wire messages and errors."""
