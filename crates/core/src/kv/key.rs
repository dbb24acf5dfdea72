//! What a block of KV is: a hash over everything that shapes its bytes, and everything before it.
//!
//! Every field goes into the hash with a name of its own and its length before it, so that no two different lists of
//! fields give the same bytes (`("ab", "c")` and `("a", "bc")`, an adapter called like a tenant).

use alloc::{string::String, vec::Vec};
use core::fmt;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use crate::ids::Digest;

/// Tokens of one block.
pub const BLOCK_TOKENS: u32 = 64;

/// Who may share with whom: requests of the same domain only. Set by the server, never by a caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrustDomain(pub [u8; 32]);

/// All that shapes the bytes of a model's KV, but for tokens and trust domain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KvIdentity(pub [u8; 32]);

/// One block: its tokens, at their place behind all tokens before them, of one model, in one trust domain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 32]);

macro_rules! hexadecimal {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&Digest(self.0).hex()[..12])
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&Digest(self.0).hex())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let mut text = String::from("sha256:");
                text.push_str(&String::deserialize(deserializer)?);
                Digest::parse(&text).map(|digest| Self(digest.0)).map_err(serde::de::Error::custom)
            }
        }
    };
}

hexadecimal!(TrustDomain);
hexadecimal!(KvIdentity);
hexadecimal!(BlockKey);

/// A hash that names what it takes in.
struct Fields(Sha256);

impl Fields {
    fn begin(purpose: &str) -> Self {
        Self(Sha256::new()).field("warmset", purpose.as_bytes())
    }

    fn field(mut self, name: &str, value: &[u8]) -> Self {
        for part in [name.as_bytes(), value] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    fn end(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

impl TrustDomain {
    /// The domain with this name.
    pub fn named(name: &str) -> Self {
        Self(Fields::begin("trust domain").field("name", name.as_bytes()).end())
    }
}

impl KvIdentity {
    /// `model` covers weights, adapters, tokenizer, template and settings; `layout` is what the engine says of the
    /// bytes it writes, `build` which engine it is.
    pub fn new(model: &Digest, layout: &str, build: &str) -> Self {
        let fields = Fields::begin("kv identity").field("model", &model.0);
        Self(fields.field("layout", layout.as_bytes()).field("build", build.as_bytes()).end())
    }
}

/// The keys of all full blocks of a run of tokens.
pub fn chain(identity: &KvIdentity, domain: &TrustDomain, tokens: &[u32]) -> Vec<BlockKey> {
    let mut parent = root(identity, domain);
    tokens
        .chunks_exact(BLOCK_TOKENS as usize)
        .map(|tokens| {
            parent = child(&parent, tokens);
            parent
        })
        .collect()
}

/// What stands for everything before the first block.
pub fn root(identity: &KvIdentity, domain: &TrustDomain) -> BlockKey {
    BlockKey(Fields::begin("kv root").field("identity", &identity.0).field("domain", &domain.0).end())
}

/// The block with these tokens behind its parent.
pub fn child(parent: &BlockKey, tokens: &[u32]) -> BlockKey {
    let mut hash = Fields::begin("kv block").field("parent", &parent.0).field("tokens", &[]).0;
    hash.update((tokens.len() as u64).to_le_bytes());
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    BlockKey(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identity() -> KvIdentity {
        KvIdentity::new(&Digest([7; 32]), "layout", "build")
    }

    #[test]
    fn the_vectors_are_golden() {
        // Blocks on disk carry these: another value would lose every one of them.
        let tokens: Vec<u32> = (0..128).collect();
        let keys = chain(&identity(), &TrustDomain::named("default"), &tokens);
        assert_eq!(Digest(keys[0].0).hex(), "9d03dbdefe149888753f1fd219be1540f8f16490d5216a138729459bbc300eef");
        assert_eq!(Digest(keys[1].0).hex(), "632bf9dd3e355f45dc367548a822c8d14418a7f98d259b31538a41f50bd427e2");
    }

    #[test]
    fn nothing_is_shared_by_moving_a_border() {
        let one = KvIdentity::new(&Digest([7; 32]), "ab", "c");
        let other = KvIdentity::new(&Digest([7; 32]), "a", "bc");
        assert_ne!(one, other);
        assert_ne!(TrustDomain::named("default").0, root(&identity(), &TrustDomain::named("default")).0);
    }

    proptest! {
        #[test]
        fn a_key_covers_model_domain_tokens_and_everything_before(
            tokens in prop::collection::vec(0u32..9, 64..300),
            at in 0usize..64,
        ) {
            let domain = TrustDomain::named("a");
            let keys = chain(&identity(), &domain, &tokens);
            prop_assert_eq!(keys.len(), tokens.len() / 64);
            let mut changed = tokens.clone();
            changed[at] += 1;
            for others in [
                chain(&identity(), &domain, &changed),
                chain(&identity(), &TrustDomain::named("b"), &tokens),
                chain(&KvIdentity::new(&Digest([7; 32]), "layout", "other"), &domain, &tokens),
                chain(&KvIdentity::new(&Digest([8; 32]), "layout", "build"), &domain, &tokens),
            ] {
                prop_assert!(keys.iter().zip(&others).all(|(key, other)| key != other));
            }
        }
    }
}
