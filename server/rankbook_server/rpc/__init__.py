"""The thin layer between gRPC and the registry."""
