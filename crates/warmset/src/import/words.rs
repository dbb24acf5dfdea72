//! Macros and words of a llama-swap command.

use std::collections::BTreeMap;

/// How deep macros may stand in macros.
const DEPTH_MAX: usize = 32;
/// The longest text that macros may grow to.
const TEXT_BYTES_MAX: usize = 256 << 10;

/// Replaces `${name}` by its value, `${env.NAME}` by a variable of this process, until none is left. `${PORT}`, whose
/// value only a start decides, stays.
pub(super) fn expand(text: &str, macros: &BTreeMap<String, String>) -> Result<String, String> {
    let mut text = text.to_owned();
    for _ in 0..DEPTH_MAX {
        let next = expand_once(&text, macros)?;
        if next == text {
            return Ok(text);
        }
        if next.len() > TEXT_BYTES_MAX {
            return Err(format!("its macros make it longer than {TEXT_BYTES_MAX} bytes"));
        }
        text = next;
    }
    Err("its macros name each other in a circle".to_owned())
}

fn expand_once(text: &str, macros: &BTreeMap<String, String>) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find("${") {
        let (before, from) = rest.split_at(begin);
        out += before;
        let Some(end) = from.find('}') else { return Ok(out + from) };
        let name = &from[2..end];
        match (name, macros.get(name), name.strip_prefix("env.")) {
            ("PORT", ..) => out += "${PORT}",
            (_, Some(value), _) => out += value,
            (_, None, Some(variable)) => {
                let value = std::env::var(variable);
                out += &value.map_err(|_| format!("it uses the variable {variable}, which is not set here"))?;
            }
            _ => return Err(format!("there is no macro ${{{name}}}")),
        }
        rest = &from[end + 1..];
    }
    Ok(out + rest)
}

/// Takes a command apart as llama-swap does: comment lines are left out, and a backslash at the end of a line joins it
/// with the next.
pub(super) fn words(command: &str) -> Result<Vec<String>, String> {
    let lines = command.lines().filter(|line| !line.trim_start().starts_with('#'));
    let lines = lines.map(|line| line.trim_end().strip_suffix('\\').unwrap_or(line));
    let joined = lines.collect::<Vec<_>>().join(" ");
    let words = shell_words::split(&joined).map_err(|_| "a quote in its cmd does not end".to_owned())?;
    if words.is_empty() { Err("its cmd is empty".to_owned()) } else { Ok(words) }
}

/// The value of an option, by any of its names: `--port 1` or `--port=1`.
pub(super) fn option<'a>(words: &'a [String], names: &[&str]) -> Option<&'a str> {
    let (index, joined) = position(words, names)?;
    if joined { words[index].split_once('=').map(|(_, value)| value) } else { words.get(index + 1).map(String::as_str) }
}

/// Replaces the value of an option.
pub(super) fn set_option(words: &mut [String], names: &[&str], value: &str) {
    let Some((index, joined)) = position(words, names) else { return };
    if joined {
        let name = words[index].split_once('=').map_or("", |(name, _)| name);
        words[index] = format!("{name}={value}");
    } else if let Some(place) = words.get_mut(index + 1) {
        value.clone_into(place);
    }
}

fn position(words: &[String], names: &[&str]) -> Option<(usize, bool)> {
    words.iter().enumerate().skip(1).find_map(|(index, word)| {
        if names.contains(&word.as_str()) {
            return Some((index, false));
        }
        let name = word.split_once('=').map(|(name, _)| name)?;
        (name.starts_with("--") && names.contains(&name)).then_some((index, true))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn macros(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn macros_stand_in_macros_but_not_in_circles() {
        let known =
            macros(&[("server", "llama-server --port ${PORT} ${args}"), ("args", "-c ${ctx}"), ("ctx", "4096")]);
        assert_eq!(expand("${server} -m a", &known).unwrap(), "llama-server --port ${PORT} -c 4096 -m a");
        assert!(expand("${absent}", &known).unwrap_err().contains("no macro ${absent}"));
        assert!(expand("${a}", &macros(&[("a", "${b}"), ("b", "${a}")])).unwrap_err().contains("circle"));
        assert!(expand("${a}", &macros(&[("a", "${a}${a}")])).is_err());
        assert!(expand("${env.WARMSET_NO_SUCH_VARIABLE}", &known).unwrap_err().contains("not set"));
        assert_eq!(expand("100 % ${", &known).unwrap(), "100 % ${");
    }

    #[test]
    fn commands_are_taken_apart() {
        let text = "# a comment\nserver --a 'x y' \\\n  --b=\"z\"\n  # another\n-c 3\n";
        assert_eq!(words(text).unwrap(), ["server", "--a", "x y", "--b=z", "-c", "3"]);
        assert!(words("# nothing").is_err() && words("a 'b").is_err());
        let mut found = words(text).unwrap();
        assert_eq!((option(&found, &["--b"]), option(&found, &["--ctx-size", "-c"])), (Some("z"), Some("3")));
        assert_eq!(option(&found, &["server"]), None, "the program is no option");
        set_option(&mut found, &["--b"], "1");
        set_option(&mut found, &["-c"], "4");
        assert_eq!(found[3..], ["--b=1", "-c", "4"]);
    }
}
