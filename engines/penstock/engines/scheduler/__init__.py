"""The iteration-level scheduler: plain data structures, no clocks, no threads, no awaits."""
