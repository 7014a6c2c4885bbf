"""Finds and reads Hugging Face checkpoints: config.json, weights in safetensors, and the tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxrl_llm.errors import MissingHere, UserError, check_local, describe
from jaxrl_llm.machine import bucket, progress, sharding
from jaxrl_llm.models import names
from jaxrl_llm.models.adapters import Adapters, quantize_int8
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.structs import PyTree

if TYPE_CHECKING:  # The import takes a second, and a check of a config does not need it.
    from jaxrl_llm.models.decoder import Decoder

# A download of a checkpoint takes the files with these endings: settings and tokenizer, and the weights.
DESCRIPTION_ENDINGS = (".json", ".jinja", ".txt", ".model")
WEIGHT_ENDINGS = (".safetensors",)
FINGERPRINT_BYTES = 2**16  # number of bytes of each tensor that `fingerprint` reads
# Files that `fingerprint` hashes besides config.json and the weights, because these files change the input tokens, the
# output text or the stop ids of a model.
FINGERPRINTED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
# Files with the settings of a model's image processor: of transformers 5, and of earlier versions.
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
# Parameters that some checkpoints store for all experts of a layer in one tensor.
FUSED_EXPERTS = ("layers/experts/gate_up/kernel", "layers/experts/down/kernel")
# Tensor names of the head of a language model, and of the head of a reward or value model.
HEAD, SCORE = "lm_head.weight", "score.weight"
HEADS = (HEAD, SCORE)
# {model_type of an unsupported vision-language model: family of its text model}. The error message for such a model
# proposes this family where config.json does not name it.
TEXT_FAMILIES = {"internvl_chat": "qwen2", "mllama": "llama", "qwen2_5_omni": "qwen2"}
ADAPTER = "adapter_config.json"  # marks a folder that PEFT wrote
# Mean and standard deviation of red, green and blue in CLIP. transformers uses them if a checkpoint has no numbers.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Dtypes of weights that this package reads and exports: {name in safetensors: name in config.json}.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def is_hub_id(path: str) -> bool:
    """Returns whether `path` is a hub id, so it has the form org/name, and not an existing local path."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path)) and not Path(path).expanduser().exists()


def find_checkpoint(path: str, field: str = "config.model.path", *, weights: bool = True) -> Path:
    """Returns the local folder of a checkpoint, after a download if `path` is a hub id or a bucket address.

    path: local folder, hub id or bucket address. field: config field or flag that errors name. weights: whether to
    download the weights too. Raises: UserError, if `path` has no checkpoint, or holds PEFT adapters.
    """
    check_local(field, path)
    if bucket_address := bucket.address(path):
        all_endings = DESCRIPTION_ENDINGS + WEIGHT_ENDINGS
        folder = bucket.fetch_folder(
            field, bucket_address, all_endings, all_endings if weights else DESCRIPTION_ENDINGS
        )
    elif is_hub_id(path):
        folder = _download(path, field, weights=weights)
    else:
        folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    # The folder holds no model. The error says what it holds instead, if it holds adapters or unmerged weights.
    if (folder / ADAPTER).is_file():
        raise UserError(_adapter_error(folder, path, field))
    if remedy := _merge_remedy(folder):
        raise UserError(f"{field} = {path!r} {remedy}")
    error, problem = (UserError, "has no config.json") if folder.exists() else (MissingHere, "does not exist")
    raise error(
        f"{field} = {path!r}: the folder {problem}: set {field} to a Hugging Face folder or a hub id (org/name)"
    )


def find_local_checkpoint(path: str) -> Path | None:
    """Returns the local folder of a checkpoint without using the network; None for a hub id that is not cached."""
    # Imported here, because the import is slow and only hub ids need it.
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(path):
        return find_checkpoint(path, weights=False)
    file = try_to_load_from_cache(path, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def _download(path: str, field: str, *, weights: bool) -> Path:
    """Downloads a checkpoint from the hub, or finds it in the hub's cache, and returns its folder."""
    # Imported here, because the import is slow and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # *.bin and *.pt are left out, because they are pickles, which can run code, and would double the download.
        endings = DESCRIPTION_ENDINGS + WEIGHT_ENDINGS if weights else DESCRIPTION_ENDINGS
        return Path(snapshot_download(path, allow_patterns=[f"*{ending}" for ending in endings]))
    # The hub raises exceptions of many types: for a missing network, and for an unknown or a gated model. The user can
    # remedy each of these causes.
    except Exception as error:
        if isinstance(error, GatedRepoError):
            remedy = "ask for access on the model's page, and log in with a token (hf auth login, or HF_TOKEN)"
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "check the name; for a private model, log in with a token (hf auth login, or HF_TOKEN)"
        else:
            download_command = f"hf download {path} --local-dir DIR"
            remedy = f"download it on a machine with a network ({download_command}), and set {field} to DIR"
        problem = f"{field} = {path!r}: no such local folder, and the hub answers: {_first_line(error)}"
        raise UserError(f"{problem.rstrip('.: ')}: {remedy}") from error


def _adapter_error(folder: Path, path: str, field: str) -> str:
    """Returns the error message for a folder of PEFT adapters where a model is expected."""
    base_model = read_config(folder, ADAPTER).get("base_model_name_or_path") or "the model that it adapts"
    problem = f"{field} = {path!r}: the folder holds PEFT adapters ({ADAPTER}), but must hold a model"
    if field == "config.model.path":
        remedy = f"set model.path to their base, {base_model}, and adapters.path to this folder (configs/lora.py)"
    else:
        remedy = f"merge the adapters into their base, {base_model}, with PEFT (merge_and_unload), and use the result"
    return f"{problem}: {remedy}"


def _merge_remedy(folder: Path) -> str:
    """Returns the end of an error for a folder with unmerged weight shards of the trainer veRL; "" without shards."""
    for candidate in (folder, folder / "actor", folder.parent):
        if any(candidate.glob("model_world_size_*_rank_*.pt")):
            command = f"python -m verl.model_merger merge --backend fsdp --local_dir {shlex.quote(str(candidate))}"
            return f"holds the shards of veRL's FSDP workers: merge them with {command} --target_dir DIR, and use DIR"
    return ""


def _first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns the content of a folder's config.json, or of another JSON file. Raises: UserError, if it is no object."""
    try:
        settings = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} cannot be read ({error}): restore the file") from None
    if not isinstance(settings, dict):
        raise UserError(f"{folder / name} must hold a JSON object: restore the file")
    return settings


def load_model(
    folder: Path,
    mesh: Mesh | None = None,
    *,
    family: str = "",
    dtype: str = "float32",
    remat: str = "none",
    row_parts: int = 1,
) -> Decoder:
    """Returns the decoder of a checkpoint folder, without its parameters.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. dtype, remat,
    row_parts: fields of `DecoderConfig`. Raises: UserError, for an unsupported family, quantization or dtype.
    """
    config_json, family = read_config(folder), family_of(folder, family)
    if config_json.get("quantization_config"):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config is set, but quantized weights are not supported: use the "
            "checkpoint from which they were quantized"
        )
    # The dtype of the files is only checked here: the model computes in `dtype`.
    _config_dtype(folder)
    cfg = replace(read_decoder_config(family, config_json), dtype=dtype, remat=remat, row_parts=row_parts)
    if cfg.vision:
        mean, std = read_pixel_scale(folder)
        cfg = replace(cfg, vision=replace(cfg.vision, pixel_mean=mean, pixel_std=std))
    # Imported here, because checks of a config import this module, and the decoder's import takes a second.
    from jaxrl_llm.models.decoder import decoder_of

    return decoder_of(cfg, mesh)


def family_of(folder: Path, user_function: str = "") -> str:
    """Returns the family of a checkpoint folder: its `model_type` if this package has it, else `user_function`.

    user_function: dotted name of a user's function (`model.family`), "" = none. Raises: UserError, if this package
    lacks the model_type and there is no user function.
    """
    config_json, families = read_config(folder), known_families()
    model_type = str(config_json.get("model_type", ""))
    if model_type in families:
        return model_type
    if not user_function:
        problem = _unsupported_family(model_type, config_json, families)
        raise UserError(f"{folder / 'config.json'}: model_type {model_type!r} {problem}")
    return user_function


def read_decoder_config(family: str, config_json: dict[str, Any]) -> DecoderConfig:
    """Returns the decoder's shape and options, as the function of a model family reads them from a config.json.

    family: name of a family module of this package, or dotted name of a user's function. config_json: content of the
    file. Raises: UserError, if the family does not support the content, or the user's function fails.
    """
    is_user_function = "." in family
    try:
        cfg = names.family_function(family)(config_json)
    except UserError:
        raise
    except Exception as error:
        # An exception of a family of this package is a bug, so its traceback must be seen.
        if not is_user_function:
            raise
        raise UserError(
            f"config.model.family = {family!r}: the function raised {describe(error)}: correct it"
        ) from error
    if not isinstance(cfg, DecoderConfig):
        raise UserError(
            f"config.model.family = {family!r}: the function returned {cfg!r:.80}: let it return a DecoderConfig"
        )
    return replace(cfg, family=family) if is_user_function else cfg


def read_image_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that holds the settings of a model's image processor, and the settings.

    processor_config.json, which transformers 5 writes, precedes preprocessor_config.json. Raises: UserError, if the
    folder has neither.
    """
    if (folder / PROCESSOR).is_file():
        image_settings = read_config(folder, PROCESSOR).get("image_processor")
        if isinstance(image_settings, dict):
            return folder / PROCESSOR, image_settings
    if not (folder / PREPROCESSOR).is_file():
        raise UserError(f"{folder} has no {PREPROCESSOR}, which holds the settings for images: restore the file")
    return folder / PREPROCESSOR, read_config(folder, PREPROCESSOR)


def read_pixel_scale(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and the standard deviation by which a model normalizes red, green and blue of its images.

    Pixels are between 0 and 1. Raises: UserError, if the settings of the folder's image processor are not three numbers
    each, or pixels have another range.
    """
    file, settings = read_image_processor(folder)
    factor = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise UserError(f"{file}: rescale_factor is {factor!r}, but must be 1/255: restore the file")
    if not settings.get("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    # transformers writes a setting only if it differs from the default of the image processor's class.
    pixel_scale: dict[str, tuple[float, ...]] = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    if str(settings.get("image_processor_type", "")).startswith("Gemma3"):
        pixel_scale = dict.fromkeys(pixel_scale, (0.5,) * 3)
    for name, default in pixel_scale.items():
        channel_numbers = settings.get(name) or default
        is_sequence = isinstance(channel_numbers, list | tuple)
        if not is_sequence or [type(x) in (int, float) for x in channel_numbers] != [True] * 3:
            raise UserError(f"{file}: {name} is {channel_numbers!r}, but must be three numbers: restore the file")
        pixel_scale[name] = tuple(map(float, channel_numbers))
    return pixel_scale["image_mean"], pixel_scale["image_std"]


def tensor_table(folder: Path, family: str = "") -> TensorNames:
    """Returns, for each parameter of the model, the name of its tensors in a checkpoint folder.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. Raises: UserError, if
    a weight file is missing or broken.
    """
    tensor_files = _open_tensors(folder) if any(folder.glob("*.safetensors")) else {}
    return _folder_table(family_of(folder, family), tensor_files)


def _folder_table(family: str, tensor_files: dict[str, Any]) -> TensorNames:
    """Returns {path of a parameter: template of its tensor names}; a `SwappedAxes` if the files swap two of its axes.

    tensor_files: {name of a tensor: open file that holds the tensor}. Only tensors with all experts can be swapped.
    """
    table = names.matching_table(family, tensor_files)
    if FUSED_EXPERTS[0] not in table:
        return table
    fused_templates = {path: template for path, template in table.items() if path in FUSED_EXPERTS}
    # Shapes of the two expert tensors of layer 0.
    fused_shapes = [
        tensor_files[name].get_slice(name).get_shape()
        for template in fused_templates.values()
        if (name := template.format(0)) in tensor_files
    ]
    # Files on the hub have the shapes [experts, width, 2 x expert width] and [experts, expert width, width].
    # transformers 5 writes the last two axes swapped. The place of `width` shows which form a file has.
    if len(fused_shapes) < len(FUSED_EXPERTS) or fused_shapes[0][1] == fused_shapes[1][2]:
        return table
    swapped_templates = {path: names.SwappedAxes(template) for path, template in fused_templates.items()}
    return {**table, **swapped_templates}


def _unsupported_family(family: str, settings: dict[str, Any], families: list[str]) -> str:
    """Returns the end of the error for a model_type that this package lacks, with the models to use instead.

    family: the model_type. settings: content of config.json. families: the supported families.
    """
    if family not in TEXT_FAMILIES and "vision_config" not in settings:
        remedy = (
            "use one of these, or set model.family to your own function that reads this config.json (docs/models.md)"
        )
        return f"is not supported. Supported: {', '.join(families)}: {remedy}"
    text_family = TEXT_FAMILIES.get(family) or (settings.get("text_config") or {}).get("model_type")
    text_model = f"of the family {text_family}" if text_family in families else f"of one of {', '.join(families)}"
    image_families = ", ".join(name for name in families if "_vl" in name or name == "gemma3")
    return (
        f"is an unsupported kind of vision-language model: use a model of one of {image_families}, or a text model "
        f"{text_model}"
    )


def stored_dtype(folder: Path, family: str = "") -> np.dtype:
    """Returns the dtype of the embedding in a folder, or the dtype in its config.json if it has no weights.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. Raises: UserError, if
    exports do not support the dtype.
    """
    dtype_name = _config_dtype(folder)
    embedding = tensor_table(folder, family)["embed/embedding"]
    if any(folder.glob("*.safetensors")) and (file := _open_tensors(folder).get(embedding)):
        dtype_name = DTYPES.get(file.get_slice(embedding).get_dtype(), dtype_name)
    return jax.numpy.dtype(dtype_name)


def _config_dtype(folder: Path) -> str:
    """Returns the dtype in config.json. Raises: UserError, if exports do not support it."""
    config_json = read_config(folder)
    # Later versions of transformers write dtype, earlier versions torch_dtype.
    stored_name = config_json.get("dtype") or config_json.get("torch_dtype") or "float32"
    dtype_name = str(stored_name).removeprefix("torch.")
    if dtype_name not in DTYPES.values():
        raise UserError(
            f"{folder / 'config.json'}: dtype is {dtype_name!r}, but must be 'float32', 'bfloat16' or 'float16': use "
            "another checkpoint"
        )
    return dtype_name


def known_families() -> list[str]:
    """Returns the model families of this package: the modules with a function `decoder_config`."""
    package = Path(__file__).parent
    return sorted(f.stem for f in package.glob("*.py") if "\ndef decoder_config(" in f.read_text(encoding="utf-8"))


def load_tokenizer(folder: Path) -> Any:
    """Loads the folder's tokenizer, exactly as tokenizer.json defines it.

    AutoTokenizer is only the fallback, for folders without tokenizer.json. For a Qwen config.json, AutoTokenizer splits
    text by Qwen's rules, so a model with another tokenizer, such as a distilled one, would get wrong token ids.
    Raises: UserError, if the folder has no tokenizer, or an incomplete one.
    """
    import transformers

    # Name AutoTokenizer only where it is used, because its attribute access imports PyTorch, which takes two seconds.
    has_tokenizer_json = (folder / "tokenizer.json").is_file()
    tokenizer_class = transformers.PreTrainedTokenizerFast if has_tokenizer_json else transformers.AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(str(folder))
    # transformers raises exceptions of many types, and all of them concern the folder's files.
    except Exception as error:
        raise UserError(
            f"{folder}: the tokenizer cannot be loaded ({_first_line(error)}): restore tokenizer.json"
        ) from error
    # transformers returns a tokenizer without vocabulary where files are missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"{folder}: the tokenizer has no vocabulary: restore tokenizer.json")
    # Any id can serve as padding, because padding is neither attended to nor scored.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the token ids that end a completion, from generation_config.json, config.json and the tokenizer.

    Raises: UserError, if no file names a stop id, because completions would never end, or if a stop id is outside of
    the model's vocabulary.
    """
    # Both files and the tokenizer are read, because often only generation_config.json has the end of a chat turn.
    token_ids, vocabulary_size = set[int](), _vocabulary_size(folder)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            settings = read_config(folder, name)
            # A vision-language model may have eos_token_id in text_config.
            value = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
            values = value if isinstance(value, list) else [] if value is None else [value]
            # `type` is compared, because isinstance takes True for an int.
            if not all(type(x) is int for x in values):
                raise UserError(
                    f"{folder / name}: eos_token_id is {value!r}, but must be a token id or a list of token ids: "
                    "correct the file"
                )
            size = vocabulary_size or max(values, default=0) + 1
            if values and not 0 <= min(values) <= max(values) < size:
                raise UserError(
                    f"{folder / name}: eos_token_id is {value!r}, but the model has the tokens 0 to {size - 1}: "
                    "correct the file"
                )
            token_ids.update(values)
    if tokenizer.eos_token_id is not None:
        token_ids.add(tokenizer.eos_token_id)
    if not token_ids:
        raise UserError(
            f"{folder}: generation_config.json, config.json and the tokenizer lack eos_token_id: add it to "
            "generation_config.json"
        )
    return tuple(sorted(token_ids))


def _vocabulary_size(folder: Path) -> int | None:
    """Returns `vocab_size` of config.json, which may be in text_config; None if the file has no such number."""
    settings = read_config(folder, "config.json") if (folder / "config.json").is_file() else {}
    size = (settings | (settings.get("text_config") or {})).get("vocab_size")
    return size if isinstance(size, int) else None


def load_params(
    folder: Path,
    model: Decoder,
    mesh: Mesh,
    *,
    learns: bool = True,
    parts: Collection[str] = (),
    unused: tuple[str, ...] = (),
    transform: Callable[[str, jax.Array], Any] = lambda path, leaf: leaf,
) -> PyTree:
    """Loads a checkpoint's parameters, each shard directly from the file to its devices.

    learns: whether the model is trained; if so, its parameters are float32, else they have the dtypes of
    `Decoder.cast_for_compute`. parts: top names of the parameter tree to load, () = all. unused: names of tensors in
    the folder that are not loaded. transform(path, parameter): returns the value that takes the parameter's place in
    the tree. Raises: UserError, for a tensor that is missing, unknown or of the wrong shape, and for a broken file.
    """
    tensor_files = _open_tensors(folder)  # {name of a tensor: open file that holds the tensor}
    table = _folder_table(model.cfg.family, tensor_files)  # {path of a parameter: template of its tensor names}
    checked_files = {name: file for name, file in tensor_files.items() if name not in unused}
    _check_tensors(folder, checked_files, model.shapes, table)
    shapes = {name: part for name, part in model.shapes.items() if name in parts or not parts}

    def load_parameter(progress_bar: progress.Task, path: Any, parameter_shape: Any, dtype: Any) -> jax.Array:
        """Loads the parameter at a path of the tree. dtype: its dtype on the devices."""
        name, shape = sharding.path_name(path), parameter_shape.shape
        template = table[name]
        parameter_sharding = jax.NamedSharding(mesh, sharding.spec_for(name, shape, mesh))
        # Find the devices of this host that hold equal parts, so that each part is read from the disk only once.
        devices_by_part: dict[tuple[range, ...], list[Any]] = {}  # {index ranges of a part: devices that hold it}
        for device, slices in parameter_sharding.addressable_devices_indices_map(shape).items():
            index_ranges = tuple(range(*s.indices(size)) for s, size in zip(slices or (), shape, strict=True))
            devices_by_part.setdefault(index_ranges, []).append(device)
        # The parts are read one by one, so that the host holds only one part at a time.
        device_arrays = []
        axes = names.tensor_axes(name, template, len(shape) - names.stacked_axes(template))
        for index_ranges, devices in devices_by_part.items():
            values = _read_part(
                folder=folder,
                tensor_files=tensor_files,
                template=template,
                index_ranges=index_ranges,
                dtype=dtype,
                axes=axes,
            )
            device_arrays += [jax.device_put(values, device) for device in devices]
        progress_bar.advance()
        return transform(name, jax.make_array_from_single_device_arrays(shape, parameter_sharding, device_arrays))

    dtypes = jax.tree.map(lambda x: x.dtype, shapes) if learns else model.compute_dtypes(shapes)
    with progress.task(f"loading the tensors of {folder.name}", len(jax.tree.leaves(shapes))) as progress_bar:
        return jax.tree_util.tree_map_with_path(partial(load_parameter, progress_bar), shapes, dtypes)


def load_base(folder: Path, model: Decoder, mesh: Mesh, adapters: Adapters) -> PyTree:
    """Loads the frozen model to which adapters (LoRA) are added; its kernels at `adapters.int8_paths` become int8.

    Raises: UserError, for a missing, unknown or wrongly shaped tensor, and for a broken file.
    """

    def quantize(path: str, parameter: jax.Array) -> Any:
        """Returns the parameter at this path, as int8 values and scales if it is to be quantized."""
        if path not in adapters.int8_paths:
            return parameter
        # Each kernel is quantized when it is loaded, so that the float kernels are never all in memory.
        int8_sharding = sharding.shardings({path: jax.eval_shape(quantize_int8, parameter)}, mesh)[path]
        return jax.jit(quantize_int8, out_shardings=int8_sharding)(parameter)

    return load_params(folder, model, mesh, learns=False, transform=quantize)


def load_readout(folder: Path, model: Decoder) -> PyTree:
    """Loads the head of a sequence classification model with one label: {"kernel": [D, 1], "bias": [1]}.

    Raises: UserError, if the folder has no such head.
    """
    tensor_files, required_shape = _open_tensors(folder), (1, model.cfg.width)
    if SCORE not in tensor_files:
        raise UserError(f"{folder} has no tensor {SCORE}: use a model with a sequence classification head")
    _check_dtype(folder, tensor_files, SCORE)
    kernel = tensor_files[SCORE].get_tensor(SCORE)
    if kernel.shape != required_shape:
        raise UserError(
            f"{folder}: tensor {SCORE} has the shape {kernel.shape}, but must have {required_shape}: use a model with "
            "one label"
        )
    _check_finite(folder, SCORE, kernel)
    # The bias is 0, because the head of transformers' sequence classification models has no bias.
    return {"kernel": kernel.astype(np.float32).T, "bias": np.zeros(1, np.float32)}


def has_readout(folder: Path) -> bool:
    """Returns whether the folder holds a sequence classification model, whose head `load_readout` loads."""
    return SCORE in _open_tensors(folder)


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a checkpoint: model.safetensors, or the files that its index names.

    Raises: UserError, if a weight file or the index is missing.
    """
    index_name = "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / index_name).is_file() and any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no {index_name}, which names the file of each tensor: download it again")
    if not (folder / index_name).is_file():
        if merge_remedy := _merge_remedy(folder):
            raise UserError(f"{folder} {merge_remedy}")
        raise UserError(f"{folder} has no model.safetensors: {_conversion_remedy(folder)}")
    file_of_tensor = read_config(folder, index_name).get("weight_map", {})  # {name of a tensor: name of its file}
    files = [folder / name for name in sorted(set(file_of_tensor.values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, but {index_name} names it: download it again")
    return files


def _conversion_remedy(folder: Path) -> str:
    """Returns the end of an error for a folder without safetensors: how the user gets weights in this format."""
    # A folder in the hub's cache has no other format, because the download asks only for safetensors.
    if folder.parent.name == "snapshots":
        repo = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return (
            f"the hub's {repo} has no safetensors: download all its files (hf download {repo} --local-dir DIR) and "
            "use DIR; the next error message then tells how to convert them"
        )
    if not any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir()):
        return "download the weights again"
    conversion_code = (
        f"from transformers import AutoModelForCausalLM as M; d = {json.dumps(str(folder), ensure_ascii=False)}; "
        'M.from_pretrained(d, dtype="auto").save_pretrained(d)'
    )
    return f"convert the weights in an environment with torch: python -c {shlex.quote(conversion_code)}"


def _open_tensors(folder: Path) -> dict[str, Any]:
    """Opens the weight files of a folder, and returns {name of a tensor: open file that holds the tensor}."""
    tensor_files = {}
    for file in weight_files(folder):
        try:
            # safe_open maps the file into memory, and reads a tensor only when a slice of it is requested.
            open_file = safe_open(file, "np")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or incomplete ({error}): download it again") from None
        tensor_files.update(dict.fromkeys(open_file.keys(), open_file))
    return tensor_files


def _check_tensors(folder: Path, tensor_files: dict[str, Any], shapes: PyTree, table: TensorNames) -> None:
    """Checks that the files have exactly the tensors that config.json requires. Raises: UserError, naming a tensor.

    tensor_files: {name of a tensor: open file}. shapes: parameter tree of shapes. table: tensor names of parameters.
    """
    required_shapes = names.tensor_shapes(shapes, table)  # {name of a tensor: its shape}
    for tensor, required_shape in required_shapes.items():
        if tensor not in tensor_files:
            raise UserError(
                f"{folder} lacks the tensor {tensor}, which config.json requires: use the config.json and the "
                "weights of one checkpoint"
            )
        stored_shape = tuple(tensor_files[tensor].get_slice(tensor).get_shape())
        _check_dtype(folder, tensor_files, tensor)
        if stored_shape != required_shape:
            raise UserError(
                f"{folder}: tensor {tensor} has the shape {stored_shape}, but config.json requires {required_shape}: "
                "use the config.json and the weights of one checkpoint"
            )
    # Where config.json ties the head to the embedding, the files may hold a head that equals the embedding. A different
    # head is an error, because the model would compute other outputs with the embedding.
    embedding, head_is_tied = table["embed/embedding"], HEAD not in required_shapes
    if head_is_tied and HEAD in tensor_files and not _same_numbers(tensor_files, HEAD, embedding):
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from {embedding}: set "
            "tie_word_embeddings to false in config.json"
        )
    # Other tensors that no parameter needs are an error, except constants of the rotary embedding, which older versions
    # of transformers wrote.
    ignored_endings = (HEAD, "rotary_emb.inv_freq")
    for tensor in sorted(tensor_files.keys() - required_shapes.keys()):
        if not tensor.endswith(ignored_endings):
            family = read_config(folder)["model_type"]
            raise UserError(
                f"{folder}: the family {family} has no tensor {tensor}: use the config.json and the weights of one "
                "checkpoint"
            )


def _check_dtype(folder: Path, tensor_files: dict[str, Any], tensor: str) -> None:
    """Checks that a tensor is stored as floats. Raises: UserError, if it is quantized."""
    dtype = tensor_files[tensor].get_slice(tensor).get_dtype()
    if dtype not in (*DTYPES, "F64"):
        raise UserError(
            f"{folder}: tensor {tensor} is stored as {dtype}, but quantized weights are not supported: use the "
            "checkpoint from which they were quantized"
        )


def _same_numbers(tensor_files: dict[str, Any], name: str, other_name: str) -> bool:
    """Returns whether two tensors have the same values. Reads a part of their rows at a time, to save memory."""
    first_tensor = tensor_files[name].get_slice(name)
    second_tensor = tensor_files[other_name].get_slice(other_name)
    if first_tensor.get_shape() != second_tensor.get_shape():
        return False
    row_count, rows_at_a_time = first_tensor.get_shape()[0], 2**14
    parts = (slice(start, min(start + rows_at_a_time, row_count)) for start in range(0, row_count, rows_at_a_time))
    return all(np.array_equal(first_tensor[part], second_tensor[part]) for part in parts)


def _read_part(
    folder: Path,
    tensor_files: dict[str, Any],
    template: str,
    index_ranges: tuple[range, ...],
    dtype: Any,
    axes: tuple[int, ...],
) -> np.ndarray:
    """Reads one part of a parameter, which stacks the tensors of several layers and experts, from the weight files.

    template: name of the parameter's tensors, with {} for the layer and the expert. index_ranges: range of the part in
    each axis of the parameter. axes: order of a tensor's axes in the file, from `names.tensor_axes`. Raises: UserError,
    for an infinite or NaN value.
    """
    values = np.empty([len(index_range) for index_range in index_ranges], dtype)
    stacked_axes = names.stacked_axes(template)  # number of leading axes: layers, and experts if each has its tensor
    slices = [slice(index_range.start, index_range.stop) for index_range in index_ranges[stacked_axes:]]
    slices_in_file = tuple(slices[axis] for axis in axes)
    # Each layer, or each expert of a layer, is one tensor of the files.
    for stack_index in np.ndindex(*values.shape[:stacked_axes]):
        layer_and_expert = [index_range[i] for index_range, i in zip(index_ranges, stack_index, strict=False)]
        tensor = template.format(*layer_and_expert)
        values[stack_index] = tensor_files[tensor].get_slice(tensor)[slices_in_file].transpose(axes)
        _check_finite(folder, tensor, values[stack_index])
    return values


def _check_finite(folder: Path, tensor: str, values: np.ndarray) -> None:
    """Checks the values of a tensor. Raises: UserError, naming the tensor's file, for an infinite or NaN value."""
    # The self-test of a run would only report that sampler and trainer disagree if this check were missing.
    if not np.isfinite(values).all():
        file = next(file for file in weight_files(folder) if tensor in {*safe_open(file, "np").keys()})
        raise UserError(f"{file}: tensor {tensor} has infinite or NaN values: use another checkpoint")


def fingerprint(folder: Path) -> str:
    """Returns a hash of a model folder, by which a run notices that another model has taken the folder's place.

    To be fast, the function reads only FINGERPRINT_BYTES from the middle of each tensor.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in FINGERPRINTED_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in weight_files(folder) if any(folder.glob("*.safetensors")) else []:
        with file.open("rb") as open_file:
            # A safetensors file begins with the length of its header, and the header, which is JSON.
            header_bytes = int.from_bytes(open_file.read(8), "little")
            header = open_file.read(header_bytes)
            digest.update(file.name.encode() + header)
            data_start = open_file.tell()
            tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
            for start, stop in sorted(tensor["data_offsets"] for tensor in tensors):
                open_file.seek(data_start + max(start, (start + stop - FINGERPRINT_BYTES) // 2))
                digest.update(open_file.read(min(stop - start, FINGERPRINT_BYTES)))
    return digest.hexdigest()
