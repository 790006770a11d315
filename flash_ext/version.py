"""The one place where the version of flash_ext is written."""

VERSION = "0.1.0"
