"""The pure state machine: decides, waits for nothing."""
