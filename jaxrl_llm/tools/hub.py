"""Uploads a model's folder to a hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]
from huggingface_hub.utils import validate_repo_id

from jaxrl_llm.errors import UserError
from jaxrl_llm.session import model_card


def open_repo(repo: str, *, private: bool) -> None:
    """Creates the repository unless it exists. Callers do this before the export, so that errors come at once.

    Raises: UserError, for a wrong name, without a token, offline, or if the hub refuses.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"--push-to {repo!r} must be ORG/NAME or USER/NAME") from None
    if repo.count("/") != 1:
        raise UserError(f"--push-to {repo!r} must be ORG/NAME or USER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push-to cannot upload while the environment variable HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError("--push-to needs a token with write access: run hf auth login, or set HF_TOKEN")
    try:
        HfApi().create_repo(repo, private=private, exist_ok=True)
    except (HTTPError, OSError) as error:  # an OSError means that no connection was made
        raise _refused(repo, error) from error


def push(folder: Path, repo: str, message: str) -> str:
    """Uploads a folder in one commit, with its card, and returns the commit's URL. Raises: UserError."""
    readme = folder / "README.md"
    model_card.write(folder, model_card.for_hub(readme.read_text(encoding="utf-8"), repo))
    try:
        return HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url
    except (HTTPError, OSError, ValueError) as error:  # a ValueError means that the hub refuses the card's metadata
        raise _refused(repo, error) from error


def _refused(repo: str, error: Exception) -> UserError:
    """Returns the error for a request that the hub refused, or did not answer."""
    text = " ".join(str(error).split())[:300]
    return UserError(f"--push-to {repo} failed at {constants.ENDPOINT}: {text}; check name, token and network")
