"""Integrations, one file per ecosystem, each imported only where it is used; other libraries' spellings are converted only here."""
