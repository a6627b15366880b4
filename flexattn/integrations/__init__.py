"""Integrations with other libraries: one file or folder per ecosystem, imported on use. Other spellings are converted only here."""
