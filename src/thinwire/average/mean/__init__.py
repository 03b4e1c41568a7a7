"""The mean of all workers: `mean` has the averager, `exchange` how payloads meet, `clip` gradient clipping."""
