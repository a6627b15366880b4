"""Programs that run other projects' test files through this package's integrations, and their own tests."""
