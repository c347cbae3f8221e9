"""The report of a run or a sweep as one HTML page that needs no network, as pictures and as tables."""
