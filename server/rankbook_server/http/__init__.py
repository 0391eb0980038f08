"""The small web side: health for probes, metrics for Prometheus."""
