//! The runtimes that the configuration file defines, for models that a command serves.

use std::collections::BTreeMap;
use warmset_core::{Digest, ids::join_names};
use warmset_engine::protocol::Runtime;
use warmset_store::definition_digest;

/// What a source begins with that names a model for the server itself: nothing is fetched or stored.
const COMMAND_SOURCE: &str = "command:";

/// What a source means to the server that a command starts; none if it is a file.
pub(crate) fn command_source(source: &str) -> Option<&str> {
    source.strip_prefix(COMMAND_SOURCE)
}

/// By name.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Runtimes(BTreeMap<String, Runtime>);

impl Runtimes {
    pub(crate) fn new(runtimes: impl IntoIterator<Item = Runtime>) -> Self {
        Self(runtimes.into_iter().map(|runtime| (runtime.name.clone(), runtime)).collect())
    }

    /// A runtime by name. An error says which there are.
    pub(crate) fn get(&self, name: &str) -> Result<&Runtime, String> {
        self.0.get(name).ok_or_else(|| match self.0.len() {
            0 => format!(
                "there is no runtime {name}: define it as [[runtime]] in the server's configuration file, start the server \
                 with it, and try again"
            ),
            _ => format!("there is no runtime {name}: there are {}", join_names(self.0.keys().map(String::as_str))),
        })
    }
}

/// The identity of a definition: everything that can change what the server answers. Names and patience cannot.
pub(crate) fn runtime_digest(runtime: &Runtime) -> Digest {
    let Runtime { name: _, command, env, cwd, user, visible_devices, health: _, health_timeout_seconds: _ } = runtime;
    definition_digest(&serde_json::json!([command, env, cwd, user, visible_devices]).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> Runtime {
        Runtime {
            name: "a".into(),
            command: vec!["serve".into(), "${PORT}".into()],
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            visible_devices: None,
            health: "/health".into(),
            health_timeout_seconds: 1,
        }
    }

    #[test]
    fn whatever_may_change_an_answer_changes_the_digest() {
        let base = runtime_digest(&runtime());
        let mut same = runtime();
        (same.name, same.health, same.health_timeout_seconds) = ("b".into(), "/".into(), 2);
        assert_eq!(runtime_digest(&same), base);
        let mut changed = vec![runtime(); 5];
        changed[0].command.push("-v".into());
        changed[1].env.insert("A".into(), "1".into());
        changed[2].cwd = Some("/".into());
        changed[3].user = Some("x".into());
        changed[4].visible_devices = Some(String::new());
        assert!(changed.iter().all(|other| runtime_digest(other) != base));
    }

    #[test]
    fn a_runtime_that_is_not_there_is_named_with_those_that_are() {
        assert!(Runtimes::default().get("x").unwrap_err().contains("define it as [[runtime]]"));
        assert!(Runtimes::new([runtime()]).get("x").unwrap_err().contains("there are a"));
        assert_eq!(Runtimes::new([runtime()]).get("a"), Ok(&runtime()));
        assert_eq!(command_source("command:org/m"), Some("org/m"));
        assert_eq!(command_source("/m.gguf"), None);
    }
}
