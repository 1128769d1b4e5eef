use std::{collections::BTreeSet, fs, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use hyper::header::HeaderValue;
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::json;

use super::*;

use crate::config::gateway::Secret;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
/// Made for these tests only.
const RSA: &str = include_str!("../fixtures/rsa.pem");
const EC: &str = include_str!("../fixtures/ec.pem");
const JWKS: &str = include_str!("../../config/fixtures/jwks.json");
const API_KEY: &str = "outlast_0123456789abcdef";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn jwt_settings(jwks: Option<&Path>) -> JwtSettings {
    JwtSettings {
        secret: Some(Secret(SECRET.to_vec())),
        jwks: jwks.map(Path::to_owned),
        algorithms: vec!["HS256".to_owned(), "RS256".to_owned(), "ES256".to_owned()],
        issuer: Some("https://issuer.example.com".to_owned()),
        audience: vec!["outlast".to_owned()],
        role_claim: "realm.roles".to_owned(),
        name_claim: "sub".to_owned(),
        profile_claim: Some("view".to_owned()),
        leeway: Duration::from_secs(5),
    }
}

fn settings(jwt: Option<JwtSettings>) -> AuthSettings {
    let sha256 = Sha256::digest(API_KEY.as_bytes()).into();
    let key = ApiKey { name: "ci".to_owned(), sha256, role: None, profile: Some("small".to_owned()) };
    AuthSettings {
        jwt,
        keys: vec![key],
        default_role: None,
        wants_role: true,
        roles: BTreeSet::from(["reader".to_owned(), "writer".to_owned()]),
        profiles: BTreeSet::from(["small".to_owned()]),
    }
}

struct World {
    auth: Auth,
    _dir: tempfile::TempDir,
}

fn world(change: impl FnOnce(&mut AuthSettings)) -> World {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jwks.json");
    fs::write(&path, JWKS).unwrap();
    let mut settings = settings(Some(jwt_settings(Some(&path))));
    change(&mut settings);
    World { auth: Auth::load(settings).unwrap(), _dir: dir }
}

fn claims() -> Value {
    json!({
        "sub": "ann", "iss": "https://issuer.example.com", "aud": ["other", "outlast"], "exp": now() + 60,
        "realm": { "roles": ["staff", "writer"] },
    })
}

fn with(change: impl FnOnce(&mut Value)) -> Value {
    let mut claims = claims();
    change(&mut claims);
    claims
}

fn header(algorithm: Algorithm, id: Option<&str>) -> Header {
    // Before the first token is made: otherwise the library chooses the provider that signs to verify, too.
    signatures::install();
    Header { kid: id.map(str::to_owned), ..Header::new(algorithm) }
}

fn hs(claims: &Value) -> String {
    encode(&header(Algorithm::HS256, None), claims, &EncodingKey::from_secret(SECRET)).unwrap()
}

fn rs(claims: &Value, id: Option<&str>) -> String {
    encode(&header(Algorithm::RS256, id), claims, &EncodingKey::from_rsa_der(&der(RSA))).unwrap()
}

fn es(claims: &Value, id: Option<&str>) -> String {
    encode(&header(Algorithm::ES256, id), claims, &EncodingKey::from_ec_der(&der(EC))).unwrap()
}

fn der(pem: &str) -> Vec<u8> {
    let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    BASE64.decode(&body).unwrap()
}

fn url_safe(bytes: &[u8]) -> String {
    BASE64.encode(bytes).replace('+', "-").replace('/', "_").trim_end_matches('=').to_owned()
}

fn bearer(token: &str) -> HeaderMap {
    HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {token}")).unwrap())])
}

impl Auth {
    fn who(&self, headers: &HeaderMap) -> Result<Who, Unauthorized> {
        Ok(self.identify(headers)?.who)
    }
}

impl World {
    fn who(&self, token: &str) -> Result<Who, &'static str> {
        // A cached token gives the same result as a new one.
        let said = self.auth.who(&bearer(token));
        assert_eq!(said, self.auth.who(&bearer(token)));
        said.map_err(|error| error.words())
    }

    fn name(&self, token: &str) -> Result<String, &'static str> {
        self.who(token).map(|who| who.name)
    }
}

#[test]
fn valid_tokens_name_their_client() {
    let world = world(|_| {});
    let ann = Who { name: "ann".to_owned(), role: Some("writer".to_owned()), profile: None };
    for token in [
        hs(&claims()),
        rs(&claims(), Some("rsa-1")),
        rs(&claims(), None),
        es(&claims(), Some("ec-1")),
        es(&claims(), None),
        hs(&with(|claims| claims["aud"] = json!("outlast"))),
        hs(&with(|claims| claims["nbf"] = json!(now() + 2))),
        hs(&with(|claims| claims["exp"] = json!(now() - 2))),
    ] {
        assert_eq!(world.who(&token), Ok(ann.clone()));
    }
    let lower =
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(&format!("bearer {}", hs(&claims()))).unwrap())]);
    assert_eq!(world.auth.who(&lower), Ok(ann));
}

#[test]
fn zeros_before_the_modulus_of_a_key_do_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    let mut set: Value = serde_json::from_str(JWKS).unwrap();
    let modulus = set["keys"][0]["n"].as_str().unwrap().replace('-', "+").replace('_', "/");
    let padding = "=".repeat((4 - modulus.len() % 4) % 4);
    let modulus = [vec![0], BASE64.decode(modulus + &padding).unwrap()].concat();
    set["keys"][0]["n"] = json!(url_safe(&modulus));
    fs::write(&path, set.to_string()).unwrap();
    let auth = Auth::load(settings(Some(jwt_settings(Some(&path))))).unwrap();
    assert_eq!(auth.who(&bearer(&rs(&claims(), Some("rsa-1")))).unwrap().name, "ann");

    // A short key does not become long by zeros.
    let short = [vec![0; 200], modulus[..100].to_vec()].concat();
    set["keys"][0]["n"] = json!(url_safe(&short));
    fs::write(&path, set.to_string()).unwrap();
    let auth = Auth::load(settings(Some(jwt_settings(Some(&path))))).unwrap();
    let said = auth.who(&bearer(&rs(&claims(), Some("rsa-1"))));
    assert_eq!(said, Err(Unauthorized::Invalid("the token's signature is wrong")));
}

#[test]
fn bad_tokens_are_refused() {
    let world = world(|_| {});
    let public = url_safe(JWKS.as_bytes());
    let unsigned = |header: Value, claims: &Value| {
        format!("{}.{}.", url_safe(header.to_string().as_bytes()), url_safe(claims.to_string().as_bytes()))
    };
    let other_secret = EncodingKey::from_secret(b"another secret that is long enough");
    // A public key used as a secret: the known confusion of RS256 with HS256.
    let confused = |secret: &[u8], id: Option<&str>| {
        encode(&header(Algorithm::HS256, id), &claims(), &EncodingKey::from_secret(secret)).unwrap()
    };
    let jwk: Value = serde_json::from_str(JWKS).unwrap();
    let modulus = jwk["keys"][0]["n"].as_str().unwrap();
    let tampered = {
        let token = hs(&claims());
        let mut parts = token.split('.');
        let (head, _, signature) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
        let claims = with(|claims| claims["realm"]["roles"] = json!("admin"));
        format!("{head}.{}.{signature}", url_safe(claims.to_string().as_bytes()))
    };
    let critical = Header { crit: Some(vec!["x".to_owned()]), ..header(Algorithm::HS256, None) };
    let key = EncodingKey::from_secret(SECRET);
    let not_accepted = "the token is not accepted";
    let wrong = "the token's signature is wrong";
    let unknown = "the token is signed by an unknown key";
    let algorithm = "the token is signed by an algorithm that is not accepted";
    let table = [
        (hs(&with(|claims| claims["exp"] = json!(now() - 60))), "the token has expired"),
        (hs(&with(|claims| drop(claims.as_object_mut().unwrap().remove("exp")))), "the token has no expiry time"),
        (hs(&with(|claims| claims["exp"] = json!("soon"))), "the token has no expiry time"),
        (hs(&with(|claims| claims["nbf"] = json!(now() + 60))), "the token is not valid yet"),
        (hs(&with(|claims| claims["iss"] = json!("https://evil.example.com"))), "the token is from another issuer"),
        (hs(&with(|claims| drop(claims.as_object_mut().unwrap().remove("iss")))), "the token is from another issuer"),
        (hs(&with(|claims| claims["aud"] = json!("other"))), "the token is for another audience"),
        (hs(&with(|claims| drop(claims.as_object_mut().unwrap().remove("aud")))), "the token is for another audience"),
        (hs(&with(|claims| claims["iss"] = json!(["https://issuer.example.com"]))), "the token is from another issuer"),
        (hs(&with(|claims| claims["sub"] = json!("x".repeat(256)))), "the name in the token is too long"),
        (hs(&with(|claims| claims["sub"] = json!(""))), "the token has no client name"),
        (hs(&with(|claims| claims["sub"] = json!(5))), "the token has no client name"),
        (hs(&with(|claims| claims["view"] = json!("large"))), "the token names a profile that does not exist"),
        (unsigned(json!({"alg": "none"}), &claims()), not_accepted),
        (unsigned(json!({"alg": "None", "typ": "JWT"}), &claims()), not_accepted),
        (unsigned(json!({"typ": "JWT"}), &claims()), not_accepted),
        (unsigned(json!({"alg": "HS256"}), &claims()), wrong),
        (encode(&header(Algorithm::HS256, None), &claims(), &other_secret).unwrap(), wrong),
        (encode(&header(Algorithm::HS512, None), &claims(), &key).unwrap(), algorithm),
        (encode(&critical, &claims(), &key).unwrap(), "the token needs an extension that is not supported"),
        (rs(&claims(), Some("rsa-2")), unknown),
        (rs(&claims(), Some("ec-1")), unknown),
        (es(&claims(), Some("rsa-1")), unknown),
        (rs(&claims(), Some("secret")), unknown),
        (confused(JWKS.as_bytes(), Some("rsa-1")), wrong),
        (confused(modulus.as_bytes(), Some("rsa-1")), wrong),
        (confused(public.as_bytes(), None), wrong),
        (confused(b"secret", Some("secret")), wrong),
        (tampered, wrong),
        ("a.b.c".to_owned(), not_accepted),
        ("nonsense".to_owned(), not_accepted),
    ];
    for (n, (token, why)) in table.into_iter().enumerate() {
        assert_eq!(world.who(&token), Err(why), "line {n}: {token}");
    }
}

#[test]
fn an_algorithm_that_was_not_configured_is_refused_with_the_right_key_too() {
    let world = world(|settings| settings.jwt.as_mut().unwrap().algorithms = vec!["RS256".to_owned()]);
    let why = "the token is signed by an algorithm that is not accepted";
    assert_eq!(world.who(&hs(&claims())), Err(why));
    assert_eq!(world.who(&es(&claims(), Some("ec-1"))), Err(why));
    assert_eq!(world.name(&rs(&claims(), Some("rsa-1"))), Ok("ann".to_owned()));
}

#[test]
fn roles_and_profiles_come_from_the_claims() {
    let world = world(|_| {});
    let role = |claims: Value| world.who(&hs(&claims)).unwrap().role;
    let table = [
        (json!("reader"), "reader"),
        (json!(["staff", "reader", "writer"]), "reader"),
        // A role that is not configured has no rights, and neither has a client without a role.
        (json!("admin"), "admin"),
        (json!(["staff", "other"]), "staff"),
        (json!([]), ""),
        (json!(5), ""),
        (json!(null), ""),
    ];
    for (said, wanted) in table {
        let got = role(with(|claims| claims["realm"]["roles"] = said.clone()));
        assert_eq!(got.as_deref(), Some(wanted), "{said}");
    }
    // A claim with a dot in its name, as some issuers have them.
    let got = role(with(|claims| claims["realm.roles"] = json!("reader")));
    assert_eq!(got.as_deref(), Some("reader"));
    let who = world.who(&hs(&with(|claims| claims["view"] = json!("small")))).unwrap();
    assert_eq!(who.profile.as_deref(), Some("small"));
}

#[test]
fn a_client_without_a_role_gets_the_default_role() {
    let world = world(|settings| settings.default_role = Some("reader".to_owned()));
    let who = world.who(&hs(&with(|claims| drop(claims.as_object_mut().unwrap().remove("realm"))))).unwrap();
    assert_eq!(who.role.as_deref(), Some("reader"));
    let free = self::world(|settings| settings.wants_role = false);
    let who = free.who(&hs(&with(|claims| drop(claims.as_object_mut().unwrap().remove("realm"))))).unwrap();
    assert_eq!(who.role, None, "where there are no roles, everything is allowed");
}

#[test]
fn a_key_is_known_by_its_hash() {
    let world = world(|_| {});
    let ci = Who { name: "ci".to_owned(), role: Some(String::new()), profile: Some("small".to_owned()) };
    assert_eq!(world.who(API_KEY), Ok(ci.clone()));
    let by_header = HeaderMap::from_iter([("x-api-key".parse().unwrap(), HeaderValue::from_static(API_KEY))]);
    assert_eq!(world.auth.who(&by_header), Ok(ci));

    let keys_only = self::world(|settings| settings.jwt = None);
    assert_eq!(keys_only.who("outlast_0123456789abcdee"), Err("the API key is unknown"));
    assert_eq!(keys_only.who(&hs(&claims())), Err("the API key is unknown"));
    let hash: String = Sha256::digest(API_KEY.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(keys_only.who(&hash), Err("the API key is unknown"), "the hash is not the key");
}

#[test]
fn missing_or_duplicate_credentials_are_refused() {
    let world = world(|_| {});
    assert_eq!(world.auth.who(&HeaderMap::new()), Err(Unauthorized::Missing));
    assert_eq!(Unauthorized::Missing.challenge(), "Bearer");
    let mut twice = bearer(API_KEY);
    twice.append(AUTHORIZATION, HeaderValue::from_static("Bearer x"));
    let mut both = bearer(API_KEY);
    both.append("x-api-key", HeaderValue::from_static(API_KEY));
    let basic = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static("Basic YTpi"))]);
    let bare = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(API_KEY))]);
    let long = bearer(&"x".repeat(TOKEN_MAX + 1));
    for headers in [twice, both, basic, bare, long] {
        let error = world.auth.who(&headers).unwrap_err();
        assert!(matches!(error, Unauthorized::Invalid(_)), "{headers:?}");
        assert!(error.challenge().starts_with("Bearer error=\"invalid_token\", error_description=\""), "{error:?}");
    }
    assert_eq!(world.auth.who(&bearer("")), Err(Unauthorized::Missing));
}

#[test]
fn cached_tokens_are_bounded_and_expire() {
    let world = world(|_| {});
    for n in 0..KNOWN_MAX + 10 {
        world.auth.who(&bearer(&hs(&with(|claims| claims["n"] = json!(n))))).unwrap();
        assert!(world.auth.known.borrow().len() <= KNOWN_MAX);
    }
    let token = hs(&claims());
    world.who(&token).unwrap();
    let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
    world.auth.known.borrow_mut().get_mut(&hash).unwrap().until = now() - 1;
    assert_eq!(world.auth.who(&bearer(&token)), Err(Unauthorized::Invalid("the token has expired")));
}

#[test]
fn an_invalid_key_set_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    let good: Value = serde_json::from_str(JWKS).unwrap();
    let (rsa, ec) = (&good["keys"][0], &good["keys"][1]);
    let changed = |key: &Value, name: &str, value: &str| {
        let mut key = key.clone();
        key[name] = json!(value);
        json!({ "keys": [key] })
    };
    let table = [
        (json!({ "keys": [] }), "there is no key for RS256 or ES256 in it"),
        (json!({ "keys": [good["keys"][2]] }), "there is no key for RS256 or ES256 in it"),
        (changed(rsa, "use", "enc"), "there is no key for RS256 or ES256 in it"),
        (changed(rsa, "alg", "RS512"), "there is no key for RS256 or ES256 in it"),
        (changed(rsa, "n", "AQAB"), "its key `rsa-1` has less than 2048 bits"),
        (json!({ "keys": [rsa, rsa] }), "it has two keys with the id `rsa-1`"),
        (changed(ec, "x", "!"), "its key `ec-1` is not valid"),
        (json!([]), "it is not a JWK set"),
    ];
    for (set, why) in table {
        fs::write(&path, set.to_string()).unwrap();
        let said = read_keys(&path).err().unwrap_or_default();
        assert!(said.starts_with(why), "{set}: {said}");
    }
    assert_eq!(read_keys(&dir.path().join("none")).err().as_deref(), Some("no such file or directory"));
    fs::write(&path, JWKS).unwrap();
    assert_eq!(read_keys(&path).unwrap().len(), 2);

    let mut empty = jwt_settings(None);
    empty.secret = Some(Secret(vec![]));
    assert_eq!(Auth::load(settings(Some(empty))).err().as_deref(), Some("the secret for tokens is empty"));
    let without_keys = AuthSettings { keys: vec![], ..settings(None) };
    assert!(Auth::load(without_keys).is_err());
}
