//! The answer to `/v1/embeddings`.

use super::ask::Encoding;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Serialize, Serializer};

#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingObject<'a>>,
    model: &'a str,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct EmbeddingObject<'a> {
    object: &'static str,
    index: usize,
    embedding: Vector<'a>,
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

struct Vector<'a> {
    numbers: &'a [f32],
    encoding: Encoding,
}

impl Serialize for Vector<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.encoding {
            Encoding::Float => self.numbers.serialize(serializer),
            Encoding::Base64 => {
                let bytes: Vec<u8> = self.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                serializer.serialize_str(&STANDARD.encode(bytes))
            }
        }
    }
}

/// The answer to `/v1/embeddings`.
pub(crate) fn embeddings(model: &str, vectors: &[Vec<f32>], prompt_tokens: u32, encoding: Encoding) -> Vec<u8> {
    let objects = vectors.iter().enumerate().map(|(index, numbers)| EmbeddingObject {
        object: "embedding",
        index,
        embedding: Vector { numbers, encoding },
    });
    let usage = EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens };
    let list = EmbeddingList { object: "list", data: objects.collect(), model, usage };
    // Texts and numbers can always be written as JSON (a number that is none becomes null).
    serde_json::to_vec(&list).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn embeddings_are_little_endian_base64_or_numbers() {
        let vectors = [vec![1.0_f32, -2.5]];
        let float: Value = serde_json::from_slice(&embeddings("m", &vectors, 3, Encoding::Float)).unwrap();
        assert_eq!(float["data"][0]["embedding"], json!([1.0, -2.5]));
        assert_eq!(float["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
        let base64: Value = serde_json::from_slice(&embeddings("m", &vectors, 3, Encoding::Base64)).unwrap();
        assert_eq!(base64["data"][0]["embedding"], "AACAPwAAIMA=");
    }
}
