"""Programs that run other projects' test files through this package's doors, and their own tests."""
