"""GPT, BERT and T5 under Megatron-LM."""
