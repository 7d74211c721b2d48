"""Everything about a model that is text: tokenizer, chat template, defaults of generation. Loaded once by the parent.

    ids = model_text.encode_chat(messages)            output = OutputText(model_text.tokenizer, stop_strings)

Invariant: prompt ids start with exactly one BOS where the model wants one, whether or not the template writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError, ModelNotFoundError, SettingsError
from kvpilot_engine.text.chat_template import ChatTemplate
from kvpilot_engine.text.gguf_metadata import GGUFFormatError, is_gguf, read_gguf_metadata
from kvpilot_engine.text.gguf_tokenizer import build_gguf_tokenizer
from kvpilot_engine.text.hf_tokenizer import build_hf_tokenizer, read_json_object
from kvpilot_engine.text.text_validation import require_encodable
from kvpilot_engine.text.tokenizer import Tokenizer
from kvpilot_engine.text.tool_dialects import AUTO_DIALECT

FROM_MODEL, NOWHERE = "auto", "none"
"""Where sampling defaults come from, besides a folder of the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a request that says nothing gets: the model's own recommendation, else the API's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """Safe to use from several threads."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: the model has none, and chat requests are refused."""
    generation_defaults: GenerationDefaults
    tool_call_parser: str = AUTO_DIALECT
    """How the model writes tool calls: one of DIALECT_NAMES."""

    @property
    def end_token_ids(self) -> frozenset[TokenId]:
        return self.tokenizer.policy.end_ids

    def encode_chat(
        self,
        messages: Iterable[object],
        *,
        tools: list[object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> list[TokenId]:
        """Render and encode a chat request's messages; control-token text in them stays text."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        rendered = self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        parts = self.tokenizer.split_at_specials(rendered.masked_text)
        unmasked = (part.translate(rendered.unmask) if isinstance(part, str) else part for part in parts)
        return self.tokenizer.with_bos(self.tokenizer.encode_parts(unmasked))

    def encode_prompt(self, prompt: str, *, param: str = "prompt", add_bos: bool = True) -> list[TokenId]:
        """Encode a completion's prompt, in which control-token text means the token: the caller is trusted with it."""
        require_encodable(prompt, param)
        ids = self.tokenizer.encode(prompt, specials_as_text=False)
        return self.tokenizer.with_bos(ids) if add_bos else ids


def load_model_text(
    model_path: Path,
    *,
    tokenizer_path: Path | None = None,
    chat_template_path: Path | None = None,
    generation_config: str = FROM_MODEL,
    tool_call_parser: str = AUTO_DIALECT,
) -> ModelText:
    """Load from a GGUF file, a folder with one, or a Hugging Face folder.

    `tokenizer_path` (same kinds) stands in for the model's own tokenizer and template, `chat_template_path` for the
    template. `generation_config` is FROM_MODEL, NOWHERE, or a folder with a generation_config.json; it decides about
    sampling defaults only: where a model ends is its own. Raises ModelNotFoundError or SettingsError.
    """
    files = _read_text_files(tokenizer_path or model_path)
    source = files.chat_template
    if chat_template_path is not None:
        try:
            source = chat_template_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError([f"--chat-template {chat_template_path}: {error}"]) from error
    template = None
    if source is not None:
        template = ChatTemplate(
            source,
            named_specials=files.tokenizer.policy.named_specials,
            special_texts=files.tokenizer.special_texts,
        )
    return ModelText(
        tokenizer=files.tokenizer,
        chat_template=template,
        generation_defaults=_choose_generation_defaults(generation_config, files),
        tool_call_parser=tool_call_parser,
    )


def _choose_generation_defaults(where: str, files: _TextFiles) -> GenerationDefaults:
    if where == FROM_MODEL:
        return files.generation_defaults
    if where == NOWHERE:
        return GenerationDefaults()
    file = Path(where) / "generation_config.json"
    if not file.is_file():
        raise SettingsError(
            [f"--generation-config is {where}: it must be auto, none or a folder that holds {file.name}"]
        )
    return _read_generation_defaults(read_json_object(file))


def load_tokenizer(path: Path) -> Tokenizer:
    """Load only the tokenizer of a GGUF file or a Hugging Face folder."""
    return _read_text_files(path).tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextFiles:
    tokenizer: Tokenizer
    chat_template: str | None
    generation_defaults: GenerationDefaults


def _read_text_files(path: Path) -> _TextFiles:
    if is_gguf(path):
        return _read_gguf(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} is neither a GGUF file nor a folder")
    if (path / "tokenizer.json").is_file():
        return _read_folder(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _read_gguf(gguf_files[0])
    found = ", ".join(file.name for file in gguf_files) or "neither"
    raise ModelNotFoundError(f"{path} must hold tokenizer.json or exactly one .gguf file; found: {found}")


def _read_gguf(path: Path) -> _TextFiles:
    try:
        metadata = read_gguf_metadata(path)
    except GGUFFormatError as error:
        raise SettingsError([f"model {error}"]) from error
    template = metadata.get("tokenizer.chat_template")
    return _TextFiles(
        tokenizer=build_gguf_tokenizer(metadata, path),
        chat_template=template if isinstance(template, str) else None,
        generation_defaults=GenerationDefaults(),
    )


def _read_folder(folder: Path) -> _TextFiles:
    config = read_json_object(folder / "tokenizer_config.json")
    generation_config = read_json_object(folder / "generation_config.json")
    return _TextFiles(
        tokenizer=build_hf_tokenizer(folder, config=config, generation_config=generation_config),
        chat_template=_find_template(folder, config),
        generation_defaults=_read_generation_defaults(generation_config),
    )


def _find_template(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several with names, as in Command R
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _read_generation_defaults(config: Mapping[str, object]) -> GenerationDefaults:
    def get_number(key: str, default: float) -> float:
        value = config.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    return GenerationDefaults(
        temperature=get_number("temperature", 1.0),
        top_p=get_number("top_p", 1.0),
        top_k=int(get_number("top_k", 0)),
        min_p=get_number("min_p", 0.0),
        repetition_penalty=get_number("repetition_penalty", 1.0),
    )
