//! Verifies the signatures of tokens with `ring`, which TLS and NATS need anyway, for the crate `jsonwebtoken`. It signs
//! nothing.

use jsonwebtoken::{
    Algorithm, DecodingKey, DecodingKeyKind, EncodingKey,
    crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils},
    errors::Result,
    signature::{Error, Verifier},
};
use ring::{
    hmac,
    signature::{ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey},
};

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory,
    verifier_factory: |algorithm, key| Ok(Box::new(Signatures { algorithm: *algorithm, key: key.clone() })),
    // Used only to make key sets from private keys.
    key_utils: KeyUtils::new_unimplemented(),
};

/// From now on the whole process verifies tokens in this way. A second call changes nothing.
pub(super) fn install() {
    let _ = PROVIDER.install_default();
}

#[cfg(not(test))]
fn signer_factory(_: &Algorithm, _: &EncodingKey) -> Result<Box<dyn JwtSigner>> {
    Err(jsonwebtoken::errors::ErrorKind::InvalidAlgorithm.into())
}

/// Tests make tokens as a provider would, with another implementation than the one that verifies them.
#[cfg(test)]
fn signer_factory(algorithm: &Algorithm, key: &EncodingKey) -> Result<Box<dyn JwtSigner>> {
    (jsonwebtoken::crypto::rust_crypto::DEFAULT_PROVIDER.signer_factory)(algorithm, key)
}

struct Signatures {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Verifier<Vec<u8>> for Signatures {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> std::result::Result<(), Error> {
        let verified = match (self.algorithm, self.key.kind()) {
            (Algorithm::HS256, DecodingKeyKind::SecretOrDer(secret)) => {
                hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, secret), message, signature)
            }
            (Algorithm::RS256, DecodingKeyKind::RsaModulusExponent { n, e }) => {
                let key = RsaPublicKeyComponents { n: without_zeros(n), e: without_zeros(e) };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
            }
            (Algorithm::ES256, DecodingKeyKind::SecretOrDer(point)) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, signature)
            }
            _ => return Err(Error::new()),
        };
        verified.map_err(|_| Error::new())
    }
}

impl JwtVerifier for Signatures {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

/// Some key sets have zeros before a number; `ring` refuses them.
fn without_zeros(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    &number[zeros..]
}
