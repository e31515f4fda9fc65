# Generated from schema/torchturbo.schema.json by `nox -s codegen`. Do not edit.
"""Everything that is generated from the schema."""
