//! A request body as named fields, checked one by one: the whole is scanned once for depth and forbidden keys, and
//! each field is read only as what it may be, so that a hostile body costs no more memory than its own bytes.

use crate::errors::ApiError;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use std::{borrow::Cow, collections::BTreeMap, fmt, marker::PhantomData, ops::RangeInclusive};

/// How deep a body may be nested.
pub(crate) const JSON_DEPTH_MAX: usize = 64;
/// Fields a body may have.
pub(crate) const FIELDS_MAX: usize = 256;
/// A key that no caller may send, at any level: templates belong to the model.
const FORBIDDEN_KEY: &str = "chat_template";
const FORBIDDEN_MESSAGE: &str = "chat_template cannot be sent with a request: a model's template is part of it";

/// The top level of a request body.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    fields: BTreeMap<Cow<'a, str>, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Scans a body and takes it apart.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|_| ApiError::body("the body is not UTF-8"))?;
        let mut scanner = serde_json::Deserializer::from_str(text);
        let scanned = Scan { depth: 0 }.deserialize(&mut scanner).and_then(|()| scanner.end());
        if let Err(error) = scanned {
            let message = error.to_string();
            return Err(if message.starts_with(FORBIDDEN_MESSAGE) {
                ApiError::param(FORBIDDEN_KEY, FORBIDDEN_MESSAGE)
            } else {
                ApiError::body(format!("the body is not acceptable JSON: {message}"))
            });
        }
        if !text.trim_start().starts_with('{') {
            return Err(ApiError::body("the body must be a JSON object"));
        }
        let map: FieldMap<'a> = serde_json::from_str(text)
            .map_err(|error| ApiError::body(format!("the body is not acceptable: {error}")))?;
        Ok(Self { fields: map.0 })
    }

    /// Refuses fields that nobody reads.
    pub(crate) fn only(&self, names: &[&str]) -> Result<(), ApiError> {
        match self.fields.keys().find(|name| !names.contains(&&***name)) {
            None => Ok(()),
            Some(name) => {
                let shown: String = name.chars().take(64).collect();
                Err(ApiError::body(format!("there is no field {shown:?}: {} are read", names.join(", "))))
            }
        }
    }

    /// A field as it was sent; `null` counts as not sent.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.get(name).copied().filter(|value| value.get() != "null")
    }

    /// A field read as a type; `expected` says what it should have been.
    pub(crate) fn read<T: Deserialize<'a>>(&self, name: &'static str, expected: &str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let value = serde_json::from_str(raw.get());
        value.map(Some).map_err(|_| ApiError::param(name, format!("{name} must be {expected}")))
    }

    /// A text.
    pub(crate) fn text(&self, name: &'static str) -> Result<Option<String>, ApiError> {
        self.read(name, "a string")
    }

    /// A flag.
    pub(crate) fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false")?.unwrap_or(false))
    }

    /// A whole number within a range.
    pub(crate) fn integer(&self, name: &'static str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let Some(number) = self.read::<f64>(name, &expected)? else { return Ok(None) };
        let inside = number.fract() == 0.0 && number >= f64::from(*range.start()) && number <= f64::from(*range.end());
        if inside {
            // Whole and within 32 bits, as just checked.
            return Ok(Some(number as u32));
        }
        Err(ApiError::param(name, format!("{name} must be {expected}")))
    }

    /// A number within a range.
    pub(crate) fn number(&self, name: &'static str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        let Some(number) = self.read::<f64>(name, &expected)? else { return Ok(None) };
        if number >= f64::from(*range.start()) && number <= f64::from(*range.end()) {
            return Ok(Some(number as f32));
        }
        Err(ApiError::param(name, format!("{name} must be {expected}")))
    }

    /// Refuses a field unless it is absent or one of the values that ask for nothing.
    pub(crate) fn refuse(&self, name: &'static str, harmless: &[&str], message: &str) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(value) if !harmless.contains(&value.get()) => Err(ApiError::unsupported(name, message)),
            _ => Ok(()),
        }
    }
}

/// The fields of an object; one sent twice is refused, since parsers disagree on which counts.
struct FieldMap<'a>(BTreeMap<Cow<'a, str>, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for FieldMap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for Fields<'a> {
            type Value = FieldMap<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldMap<'a>, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some(Text(key)) = map.next_key()? {
                    if fields.len() == FIELDS_MAX {
                        return Err(A::Error::custom("too many fields"));
                    }
                    let value: &'de RawValue = map.next_value()?;
                    if fields.insert(key, value).is_some() {
                        return Err(A::Error::custom("a field is there twice"));
                    }
                }
                Ok(FieldMap(fields))
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A text, borrowed where it holds no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// Walks a whole document without keeping any of it.
#[derive(Clone, Copy)]
struct Scan {
    depth: usize,
}

impl Scan {
    fn deeper<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.depth == JSON_DEPTH_MAX {
            return Err(E::custom(format!("nested deeper than {JSON_DEPTH_MAX} levels")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Scan {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Scan {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let deeper = self.deeper()?;
        while elements.next_element_seed(deeper)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let deeper = self.deeper()?;
        while let Some(Text(key)) = map.next_key()? {
            if key == FORBIDDEN_KEY {
                return Err(A::Error::custom(FORBIDDEN_MESSAGE));
            }
            map.next_value_seed(deeper)?;
        }
        Ok(())
    }
}

/// A list of at most `MAX` elements: reading stops at the first one too many.
pub(crate) struct Bounded<T, const MAX: usize>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Elements<T, MAX> {
            type Value = Bounded<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                let mut read = Vec::new();
                while read.len() < MAX {
                    match elements.next_element()? {
                        Some(element) => read.push(element),
                        None => return Ok(Bounded(read)),
                    }
                }
                match elements.next_element::<IgnoredAny>()? {
                    None => Ok(Bounded(read)),
                    Some(_) => Err(A::Error::invalid_length(MAX + 1, &self)),
                }
            }
        }
        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_read_with_their_name_in_every_error() {
        let fields = Fields::parse(br#"{"a": 1.5, "b": "x", "c": null, "d": 1e9, "e": 4, "f": true}"#).unwrap();
        assert_eq!(fields.number("a", 0.0..=2.0).unwrap(), Some(1.5));
        assert_eq!(fields.number("c", 0.0..=2.0).unwrap(), None);
        assert_eq!(fields.integer("e", 1..=16).unwrap(), Some(4));
        assert_eq!(fields.text("b").unwrap().as_deref(), Some("x"));
        assert!(fields.flag("f").unwrap() && !fields.flag("missing").unwrap());
        for error in [
            fields.number("a", 0.0..=1.0).unwrap_err(),
            fields.integer("a", 0..=9).unwrap_err(),
            fields.text("a").unwrap_err(),
        ] {
            assert!(error.json().contains("\"param\":\"a\""), "{}", error.json());
        }
        assert!(fields.integer("d", 1..=16).unwrap_err().json().contains("\"param\":\"d\""));
        assert!(fields.refuse("f", &["false"], "no").is_err() && fields.refuse("f", &["true"], "no").is_ok());
    }

    #[test]
    fn templates_are_refused_at_every_level_however_written() {
        for body in [
            r#"{"chat_template": "x"}"#,
            r#"{"chat_template_kwargs": {"chat_template": "x"}}"#,
            r#"{"a": [{"b": {"chat\u005ftemplate": 1}}]}"#,
        ] {
            let json = Fields::parse(body.as_bytes()).unwrap_err().json();
            assert!(json.contains("\"param\":\"chat_template\""), "{json}");
        }
        assert!(Fields::parse(br#"{"messages": [{"content": "chat_template"}], "chat_template_kwargs": {}}"#).is_ok());
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(Fields::parse(nested(JSON_DEPTH_MAX - 1).as_bytes()).is_ok());
        for depth in [JSON_DEPTH_MAX, 100_000] {
            assert!(Fields::parse(nested(depth).as_bytes()).is_err(), "{depth}");
        }
        assert!(Fields::parse("[".repeat(100_000).as_bytes()).is_err());
    }

    #[test]
    fn other_bodies_are_refused() {
        for body in
            [&b""[..], b"null", b"[]", b"\"x\"", b"{", b"{}x", b"{\"a\":1,\"a\":2}", b"{\"a\":1e999}", b"\xff{}"]
        {
            assert!(Fields::parse(body).is_err(), "{body:?}");
        }
        let many: Vec<String> = (0..=FIELDS_MAX).map(|number| format!("\"f{number}\":0")).collect();
        assert!(Fields::parse(format!("{{{}}}", many.join(",")).as_bytes()).is_err());
    }

    #[test]
    fn lists_stop_at_their_bound() {
        assert_eq!(serde_json::from_str::<Bounded<u8, 2>>("[1,2]").unwrap().0, [1, 2]);
        assert!(serde_json::from_str::<Bounded<u8, 2>>("[1,2,3]").is_err());
    }

    proptest! {
        #[test]
        fn any_body_is_read_without_panic(text in "[\\[\\]{}\":,a0e.\\\\ -]{0,60}") {
            let _ = Fields::parse(text.as_bytes());
        }
    }
}
