"""What several test files share: workers in threads and processes, small data sets, and named cases of a loop."""
