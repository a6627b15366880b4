"""Integrations, a file or folder per ecosystem, imported only where used; other libraries' spellings are converted only here."""
