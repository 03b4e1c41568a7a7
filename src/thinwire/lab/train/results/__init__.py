"""The results of a run: metrics, the functions that compute them, and where they are shown and written."""
