"""Fixtures of the stores' tests."""

from tests.contract.etcd_server import each_etcd, etcd, etcd_cluster

__all__ = ["each_etcd", "etcd", "etcd_cluster"]
