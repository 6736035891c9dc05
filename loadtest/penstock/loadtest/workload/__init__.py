"""The workload, which is what is sent, and when: sessions by seed, for any number of client processes."""

from penstock.loadtest.workload.build import Sessions, asked_requests, build
from penstock.loadtest.workload.mixes import keeps_text

__all__ = ["Sessions", "asked_requests", "build", "keeps_text"]
