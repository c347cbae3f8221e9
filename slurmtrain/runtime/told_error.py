"""The word by which rank 0 tells the other ranks of an error that ends the attempt, so that all leave by the same exit code.

srun ends with the largest exit code of all ranks, so one 78 among them would end a run that is worth another start.
"""

from __future__ import annotations

import json

from slurmtrain.errors import EXIT_CONFIG, PreflightError, RendezvousError, SlurmtrainError


def word_of(error: SlurmtrainError) -> str:
    """Return the word for an error that rank 0 raises."""
    return json.dumps([error.exit_code == EXIT_CONFIG, error.message])


def error_of_word(word: str) -> SlurmtrainError:
    """Return the error that another rank raises when it has read a word of `word_of`."""
    no_retry, sentence = json.loads(word)
    if no_retry:
        return PreflightError(sentence, hint="see rank 0's log", told_all=True)
    return RendezvousError(sentence, hint="see rank 0's log", because_of_peer=True)
