"""A claim about a registry that stops answering while its connections stay open."""

from __future__ import annotations

import time

import pytest

import rankbook


@pytest.mark.slow
def test_a_view_knows_within_20_s_that_its_registry_went_silent(rankbookd):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client:
        view = rankbook.TopologyView(client)
        view.start()
        try:
            view.wait_synced(10)
            server.pause()
            until = time.monotonic() + 20
            # Nothing tells of it, so it is looked at.
            while view.connected and time.monotonic() < until:
                time.sleep(0.05)
            assert not view.connected
            server.resume()
            view.wait_synced(20)
        finally:
            view.close()
