//! `[[runtime]]`: how a server with OpenAI's routes is started for a model.

use super::{
    Section, parse_pool,
    reader::{self, Reader},
    required,
};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
use toml::de::DeValue;
use warmset_engine::{command::variables, protocol::Runtime};

/// Runtimes one file may list.
pub(super) const RUNTIMES_MAX: usize = 256;
/// Words of one command, and variables of one environment.
const WORDS_MAX: usize = 1024;
const DEFAULT_HEALTH: &str = "/health";
const DEFAULT_HEALTH_TIMEOUT: Duration = Duration::from_secs(600);

/// Reads all of them. Two of one name are a problem.
pub(super) fn read_runtimes(reader: &mut Reader<'_>, sections: Vec<Section<'_>>) -> Vec<Runtime> {
    let mut runtimes: Vec<Runtime> = Vec::new();
    for section in sections {
        let offset = section.offset_of("name");
        let Some(runtime) = read_runtime(reader, section) else { continue };
        if runtimes.iter().any(|known| known.name == runtime.name) {
            reader.report(offset, format!("runtime.name: there are two runtimes {}: rename one", runtime.name));
        }
        runtimes.push(runtime);
    }
    runtimes
}

fn read_runtime(reader: &mut Reader<'_>, mut section: Section<'_>) -> Option<Runtime> {
    let offset = section.offset_of("command");
    let name = required(reader, &mut section, "name", reader::parsed(parse_name));
    let command = required(reader, &mut section, "command", command);
    let env = section.take(reader, "env", environment).unwrap_or_default();
    let cwd = section.take(reader, "cwd", reader::parsed(directory));
    let user = section.take(reader, "user", reader::text);
    let visible_devices = section.take(reader, "visible_devices", devices);
    let health = section.take(reader, "health", reader::parsed(path));
    let timeout = section.take(reader, "health_timeout", reader::positive_duration);
    section.finish(reader);
    let (name, command) = (name?, command?);
    let texts = command.iter().chain(env.values());
    if !texts.into_iter().any(|text| variables::named(text).is_ok_and(|names| names.contains(&"PORT"))) {
        let message =
            "runtime.command: neither command nor env says ${PORT}: the server must listen on the port it is given";
        reader.report(offset, message);
    }
    let health_timeout_seconds = timeout.unwrap_or(DEFAULT_HEALTH_TIMEOUT).as_secs().max(1);
    let health = health.unwrap_or_else(|| DEFAULT_HEALTH.to_owned());
    Some(Runtime { name, command, env, cwd, user, visible_devices, health, health_timeout_seconds })
}

/// A name for a runtime.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    parse_pool(text).map_err(|_| format!("{text:?} is not a runtime name: use 1 to 64 characters of A-Z a-z 0-9 . _ -"))
}

/// A command as one text, taken apart as a shell would but without one, or as a list of words.
fn command(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let words = match value {
        DeValue::Array(_) => reader::texts(value)?,
        _ => shell_words::split(&reader::text(value)?)
            .map_err(|_| "has a quote that does not end: write it as a list of words".to_owned())?,
    };
    if words.is_empty() || words.len() > WORDS_MAX || words.iter().any(|word| word.contains('\0')) {
        return Err(format!("must be 1 to {WORDS_MAX} words, a program and its arguments"));
    }
    words.iter().try_for_each(|word| variables::named(word).map(drop))?;
    Ok(words)
}

fn environment(value: &DeValue<'_>) -> Result<BTreeMap<String, String>, String> {
    let DeValue::Table(table) = value else {
        return Err("must be a table such as { HF_HOME = \"/models\" }".to_owned());
    };
    if table.len() > WORDS_MAX {
        return Err(format!("must have at most {WORDS_MAX} variables"));
    }
    let entries = table.iter().map(|(name, value)| {
        let name = name.get_ref().to_string();
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(format!("{name:?} is not a variable's name"));
        }
        let text = reader::text(value.get_ref()).map_err(|reason| format!("{name} {reason}"))?;
        variables::named(&text)?;
        if text.contains('\0') { Err(format!("{name} holds a zero byte")) } else { Ok((name, text)) }
    });
    entries.collect()
}

fn directory(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err(format!("{text:?} must be an absolute path")) }
}

fn path(text: &str) -> Result<String, String> {
    let plain = text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic());
    if plain { Ok(text.to_owned()) } else { Err(format!("{text:?} must be a path such as \"/health\"")) }
}

/// Devices as one text or as a list.
fn devices(value: &DeValue<'_>) -> Result<String, String> {
    let text = if value.is_array() { reader::texts(value)?.join(",") } else { reader::text(value)? };
    if text.contains('\0') { Err("holds a zero byte".to_owned()) } else { Ok(text) }
}
