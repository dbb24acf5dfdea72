//! `[[replica]]`: servers that `warmset gateway` stands in front of.

use super::{
    reader::{self, Reader, Section},
    required,
};
use warmset_gateway::proxy::{ReplicaConfig, ReplicaUrl};

/// The only kind there is: a server with OpenAI's routes.
const KIND: &str = "openai";
/// Requests that one replica may compute at a time.
const SLOTS_MAX: u32 = 65_536;

/// Reads all of them; each address may be named once.
pub(super) fn read_replicas(reader: &mut Reader<'_>, sections: Vec<Section<'_>>) -> Vec<ReplicaConfig> {
    let mut replicas: Vec<ReplicaConfig> = Vec::new();
    for section in sections {
        let offset = section.offset();
        let Some(replica) = read_replica(reader, section) else { continue };
        if replicas.iter().any(|known| known.url == replica.url) {
            reader.report(offset, format!("the replica {} is named twice", replica.url));
        }
        replicas.push(replica);
    }
    replicas
}

fn read_replica(reader: &mut Reader<'_>, mut section: Section<'_>) -> Option<ReplicaConfig> {
    let url = required(reader, &mut section, "url", |value| reader::text(value)?.parse::<ReplicaUrl>());
    section.take(reader, "kind", |value| match reader::text(value)?.as_str() {
        KIND => Ok(()),
        other => Err(format!("there is no kind {other:?} of replica: write \"{KIND}\"")),
    });
    let api_key =
        section.take(reader, "api_key_env", |value| ReplicaConfig::key_from_environment(&reader::text(value)?));
    let models = section.take(reader, "models", reader::texts).unwrap_or_default();
    let slots = section.take(reader, "slots", reader::integer(1, SLOTS_MAX));
    let capacity_tokens = section.take(reader, "capacity_tokens", reader::integer(1, u32::MAX)).map(u64::from);
    let weight = section.take(reader, "weight", weight).unwrap_or(1.0);
    section.finish(reader);
    Some(ReplicaConfig { url: url?, api_key, models, slots, capacity_tokens, weight })
}

fn weight(value: &toml::de::DeValue<'_>) -> Result<f64, String> {
    ReplicaConfig::check_weight(reader::number(value)?)
}
