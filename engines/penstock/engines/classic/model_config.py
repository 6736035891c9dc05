"""`penstock.classic.model_config` under its earlier name."""

from penstock.classic.model_config import ModelConfig, config_dict, config_json, datatype_name, datatype_value

__all__ = ["ModelConfig", "config_dict", "config_json", "datatype_name", "datatype_value"]
