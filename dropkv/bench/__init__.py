"""What `dropkv bench` measures with: tasks, runs and reports. Nothing here is needed to compress or to query."""
