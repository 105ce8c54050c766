"""The scan with one state per channel (d_state 1): a recurrence without products."""
