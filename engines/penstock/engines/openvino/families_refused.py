"""Architectures of causal language models that have no family here, with the reason."""

from __future__ import annotations

_STATE = "there is no graph for its recurrent layers yet"
_LATENT = "there is no family for it: compressed keys and values (MLA) in layers of its own"
_INDEXED = "its attention reads tokens that an index chooses, for which there is no operation"
_ENCODER = "it is a part of a model with an encoder, or attends to later tokens"
_MEDIA = "it reads or writes images or sound"
_OLD = "there is no family for it: models before 2023, with positions or layers of their own"
_RARE = "there is no family for it yet"
_LAYERS = "its layers are computed several times for each token"
_HEADS = "its layers differ in their number of heads, which OpenVINO's paged attention computes wrongly"
_ATTENTION = "its attention is of a kind for which there is no operation"
_ROUNDED = "its activations are rounded to 8 bits in a way of its own"

_BY_REASON = {
    _STATE: (
        "BailingHybridForCausalLM", "FalconMambaForCausalLM",
        "Inkling2ForCausalLM", "Inkling2LoopForCausalLM", "InklingForCausalLM",
        "JambaForCausalLM", "KimiLinearForCausalLM", "LaraMiniForCausalLM",
        "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
        "Qwen4ExpForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "Zamba2ForCausalLM",
        "ZambaForCausalLM", "ZayaForCausalLM", "xLSTMForCausalLM",
    ),
    _LATENT: ("LongcatFlashForCausalLM",),
    _INDEXED: (
        "AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Dots3NoteForCausalLM",
        "GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "MiniMaxM3VLForCausalLM",
    ),
    _ENCODER: (
        "BartForCausalLM", "BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM",
        "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CamembertForCausalLM",
        "CpmAntForCausalLM", "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM",
        "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "MBartForCausalLM", "MarianForCausalLM",
        "MegatronBertForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
        "ProphetNetForCausalLM", "RemBertForCausalLM", "RoCBertForCausalLM", "RoFormerForCausalLM",
        "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
        "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
        "XmodForCausalLM",
    ),
    _MEDIA: (
        "Apertus1p5TextForCausalLM", "AriaTextForCausalLM", "CohereCompassForCausalLM", "Emu3ForCausalLM",
        "FuyuForCausalLM", "GitForCausalLM", "GotOcr2ForConditionalGeneration", "MllamaForCausalLM",
        "MoshiForCausalLM", "MossTranscribeDiarizeForConditionalGeneration", "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM", "Phi4MultimodalForCausalLM",
    ),
    _LAYERS: ("DoryForCausalLM", "HrmTextForCausalLM"),
    _HEADS: ("LagunaForCausalLM",),
    _ATTENTION: ("DiffLlamaForCausalLM", "DogeForCausalLM"),
    _ROUNDED: ("BitNetForCausalLM",),
    _OLD: (
        "BioGptForCausalLM", "CTRLLMHeadModel", "CodeGenForCausalLM", "GPTNeoXJapaneseForCausalLM", "MptForCausalLM",
        "OpenAIGPTLMHeadModel", "PersimmonForCausalLM", "ReformerModelWithLMHead", "XGLMForCausalLM",
    ),
    _RARE: (
        "BeamForCausalLM", "BltForCausalLM", "DbrxForCausalLM", "JetMoeForCausalLM", "Kolibri1ForCausalLM",
        "ModernBertDecoderForCausalLM",
    ),
}  # fmt: skip

REFUSED_FAMILIES = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""Reason by architecture."""
