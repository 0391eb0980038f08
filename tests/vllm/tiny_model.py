"""Makes the model of these tests: four layers of random Llama, offline, in seconds.

    python tiny_model.py FOLDER

Four KV heads of 32, float32, a tokenizer of the 256 bytes. The weights mean
nothing; what matters is that there are layers to split over stages.
"""

import sys

LAYERS = 4
KV_HEADS = 4
HEAD_SIZE = 32
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def make(folder: str) -> None:
    """Writes tokenizer and weights into `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=2048,
    ).save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=8 * HEAD_SIZE,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.15,  # large enough that what is attended to decides the next token
        dtype="float32",
    )
    LlamaForCausalLM(config).float().save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    make(sys.argv[1])
