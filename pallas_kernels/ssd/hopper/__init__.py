"""The kernels of the scan for sm_90a: `wgmma`, two warpgroups, chunks of 128 tokens."""
